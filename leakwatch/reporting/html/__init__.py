"""The local HTML report, section by section."""
