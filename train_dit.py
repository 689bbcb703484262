from moh_vision.diffusion.train import main

if __name__ == "__main__":
    main()
