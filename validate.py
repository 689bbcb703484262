from moh_vision.classification.validate import main

if __name__ == "__main__":
    main()
