from moh_vision.classification.train import main

if __name__ == "__main__":
    main()
