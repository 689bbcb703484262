from moh_vision.language.train import main

if __name__ == "__main__":
    main()
