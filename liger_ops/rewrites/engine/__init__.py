"""The machinery of rewrites: patterns, matches, effects, graphs and reports."""
