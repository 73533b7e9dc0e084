"""Labels read off a shared gradient, exactly where that is possible."""
