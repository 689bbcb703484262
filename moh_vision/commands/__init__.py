"""Commands for finished runs; `python -m moh_vision` lists them. Nothing imports this room."""
