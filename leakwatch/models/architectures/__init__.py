"""The networks of the papers, one file each; ``parts`` has what several share."""
