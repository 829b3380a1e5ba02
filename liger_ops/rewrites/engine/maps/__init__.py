"""Functions of indices (`algebra`), and the maps that views are (`index_maps`)."""
