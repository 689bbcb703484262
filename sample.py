from moh_vision.diffusion.sample import main

if __name__ == "__main__":
    main()
