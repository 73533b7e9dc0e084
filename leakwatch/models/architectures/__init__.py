"""The networks of the papers, one file each."""
