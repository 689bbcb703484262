"""Images -> latents for diffusion training.   python -m moh_vision latents --vae NAME|FOLDER --data ROOT --out DIR

    DIR/train-000000.tar ...      a .npy (posterior moments) and a .cls (class number) per image, shuffled; the name of a
                                  member is the image's number in ROOT
    DIR/train.latents.json        the manifest: VAE (name, sha256, factors), size, dtype, counts, sha256 of every shard
    DIR/classes.txt               the class names; line n is class n
    DIR/train.shards.jsonl        the record: arguments and input, then a line a shard
    DIR/train.bad.txt             unreadable images and what is wrong with them, if any were left out
    DIR/.train.index.safetensors  the index that training reads

The .npy holds [2, 2C, h, w]: mean and log variance of the VAE's posterior for the image and for its mirror image, so
that training draws from the posterior and flips without the VAE. A VAE without posteriors (AutoencoderDC) gives its
latents, [2, C, h, w]. They are scaled when they are read. Images are center-cropped to --size (ADM).

Many processes share the work: `torchrun --nproc_per_node N -m moh_vision latents ...`, or `accelerate launch -m`;
DIR is then on a disk that all see. A batch never reaches into the next shard, so the result does not depend on their
number. A shard is written under a hidden name, flushed, recorded and only then renamed, so the same command goes on
after a kill at any moment. Another VAE, other arguments or changed images are refused.
"""
