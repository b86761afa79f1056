"""SM partitions on a GPU: which splits are legal, the driver that makes them, the table of lanes that owns them."""
