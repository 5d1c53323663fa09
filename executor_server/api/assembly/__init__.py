"""The parts that a daemon and a front have in common, made from the configuration."""
