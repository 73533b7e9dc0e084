"""H = JᵀJ of a sample, formed layer by layer where a layer allows it."""
