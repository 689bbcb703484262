"""What people do with finished runs. `python -m moh_vision` lists the commands; nothing imports this room."""
