"""Image folder -> webdataset shards.   python -m moh_vision shards --in IMAGEFOLDER --out DIR [--size 256]

    DIR/train-000000.tar ...      an image and a .cls (class number) per sample, shuffled over the classes
    DIR/classes.txt               the class names, sorted; line n is class n
    DIR/train.shards.jsonl        first line: format and arguments; then a line a shard: samples, bytes, sha256, bad files
    DIR/train.files.txt           line n: the file that sample n came from
    DIR/train.bad.txt             bad files and what is wrong with them, if any were left out
    DIR/.train.index.safetensors  the index that training reads (`sources.Shards`)

The same input, arguments and Pillow give the same bytes, whatever the number of workers. A shard is written under a
hidden name, flushed, recorded and only then renamed, so the same command goes on after a kill at any moment.

Every image is decoded, so that training meets no bad one. Without --size the bytes are stored unchanged, EXIF
included. With --size an image is turned upright, converted to RGB (transparency and colour profile are dropped),
its shorter side reduced to that many pixels (bicubic, antialiased; never enlarged) and stored as JPEG without
chroma subsampling.
"""

from moh_vision.data.shards.conversion import convert

__all__ = ["convert"]
