"""Megatron-Core: environment and device, process groups, families, model construction, precision, one training step.

This room knows nothing of reinforcement learning and imports no other room.
"""
