"""J v and Jᵀu of a whole batch from one recorded graph."""
