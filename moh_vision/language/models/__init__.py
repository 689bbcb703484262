"""Language models on the attention core: presets, pre-trained models, weights of runs."""
