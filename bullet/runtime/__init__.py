"""What touches a real device: SM partitions, their proof, and the sweep that measures them. Never imports the simulator."""
