"""Language models: presets, pre-trained models, weights of runs."""
