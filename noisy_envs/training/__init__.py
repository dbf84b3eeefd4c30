"""All of a training run except its algorithm: settings, environments, checkpoints, metrics, evaluation, figures."""
