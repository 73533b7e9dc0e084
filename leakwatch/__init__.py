"""Watch how much of each private sample its shared gradient gives away."""
