"""S-D attention: skew-symmetric routing less diagonal damping."""
