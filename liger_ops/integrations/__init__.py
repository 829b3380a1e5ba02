"""The ops behind functions of projects that users come from, one file each. None is imported unless
it is asked for."""
