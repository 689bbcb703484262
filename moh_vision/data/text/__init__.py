"""Only forwarders: data of text stand in `moh_vision.language.data`."""
