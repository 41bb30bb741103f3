"""Typed configuration: YAML file and `key=value` overrides to frozen dataclasses."""

from __future__ import annotations

from mcore_rl.config.describe import describe, markdown
from mcore_rl.config.load import load_config
from mcore_rl.config.roles import ActorConfig, CriticConfig, OptimizerConfig, ReferenceConfig
from mcore_rl.config.rules import Config
from mcore_rl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    InitConfig,
    LogConfig,
    ModelSection,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    WarmUpConfig,
)

__all__ = [
    "ActorConfig", "AlgorithmConfig", "CheckpointConfig", "Config", "CriticConfig", "DataConfig", "EvaluationConfig", "InitConfig",
    "LogConfig", "ModelSection", "OptimizerConfig", "ReferenceConfig", "RewardConfig", "RolloutConfig", "RunConfig", "SftConfig",
    "WarmUpConfig", "describe", "load_config", "markdown",
]
