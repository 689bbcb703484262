from moh_vision.common.errors import user_errors

if __name__ == "__main__":
    with user_errors("train_text.py"):  # one line if the packages of the extra "text" are missing
        from moh_vision.language.train import main
    main()
