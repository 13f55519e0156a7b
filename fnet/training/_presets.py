"""Presets: tested hyperparameters for the experiments.

Each dict maps the name of a preset to values of the fields of an experiment's configuration.
"""

IMAGE_CLASSIFICATION = {  # by data set
    "digits": {
        "width": 32,
        "epochs": 40,
        "batch_size": 64,
        "learning_rate": 0.05,
        "weight_decay": 1e-3,
        "augment": "affine",
    },
    "mnist": {
        "width": 32,
        "epochs": 8,
        "batch_size": 128,
        "learning_rate": 0.1,
        "weight_decay": 5e-4,
        "augment": "affine",
    },
    "fashion_mnist": {
        "width": 32,
        "depth": 2,
        "epochs": 14,
        "batch_size": 128,
        "learning_rate": 0.1,
        "weight_decay": 5e-4,
        "augment": "flip",
    },
    "cifar10": {
        "width": 64,
        "depth": 2,
        "epochs": 20,
        "batch_size": 128,
        "learning_rate": 0.1,
        "weight_decay": 5e-4,
        "augment": "flip_crop_cutout",
    },
}

LANGUAGE_MODEL = {  # by size; 10m and 124m state the approximate number of parameters
    "small": {
        "width": 128,
        "depth": 4,
        "heads": 4,
        "context": 128,
        "dropout": 0.0,
        "steps": 2000,
        "batch_size": 16,
        "learning_rate": 2e-3,
    },
    "10m": {
        "width": 384,
        "depth": 6,
        "heads": 6,
        "context": 256,
        "dropout": 0.2,
        "steps": 5000,
        "batch_size": 64,
        "learning_rate": 1e-3,
    },
    "124m": {
        "width": 768,
        "depth": 12,
        "heads": 12,
        "context": 1024,
        "dropout": 0.0,
        "steps": 20000,
        "batch_size": 16,
        "learning_rate": 6e-4,
    },
}

FINETUNE = {  # by what is trained: a linear probe of the features, all parameters, or LoRA
    "linear": {
        "epochs": 50,
        "batch_size": 256,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "weight_decay": 0.0,
    },
    "full": {
        "epochs": 5,
        "batch_size": 32,
        "optimizer": "nesterov",
        "learning_rate": 0.01,
        "weight_decay": 1e-4,
    },
    "lora": {
        "epochs": 5,
        "batch_size": 32,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "weight_decay": 0.0,
    },
}

FINETUNE_TEXT = {
    "full": {
        "epochs": 6,
        "batch_size": 8,
        "context": 128,
        "optimizer": "adamw",
        "learning_rate": 5e-4,
        "weight_decay": 0.0,
    },
    "lora": {
        "epochs": 6,
        "batch_size": 8,
        "context": 128,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "weight_decay": 0.0,
    },
}
