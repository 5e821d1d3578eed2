"""What is measured, and where it is written down; scripts, and the packages `cluster` and `gpu`."""
