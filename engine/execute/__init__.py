"""The device side of a step: attention, the runner, sampling, exits and events."""
