"""Losses for distillation: a small model learns the outputs and the hidden states of a large one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def distillation_loss(
    logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    temperature: float = 4.0,
    weight: float = 0.9,
) -> jax.Array:
    """Computes the loss of a student that learns from a teacher's logits and from labels.

        weight T^2 KL(softmax(teacher_logits / T) || softmax(logits / T)) + (1 - weight) cross_entropy(logits, labels)

    The factor T^2 keeps the size of the gradient of the KL divergence independent of the
    temperature T. No gradient flows to the teacher.

    Args:
        logits: of the student, [..., classes].
        teacher_logits: of the teacher, [..., classes].
        labels: the correct classes, integers [...]. Default None: the loss is T^2 times the KL
            divergence alone.
        temperature: T, a number above 0. A larger T teaches more about the classes to which the
            teacher gives a low probability. Default 4.
        weight: the weight of the KL divergence, in [0, 1]; the cross entropy has the rest. Default
            0.9.

    Returns:
        The losses [...], in nats.

    Raises:
        ValueError: the shapes differ, or an option is out of range.

    Source: Hinton, Vinyals and Dean (2015), Distilling the Knowledge in a Neural Network.

    >>> from fnet import compress
    >>> logits = jnp.array([[2.0, 0.0]])
    >>> float(compress.distillation_loss(logits, logits)[0])
    0.0
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"distillation_loss: expected logits of one shape, got {logits.shape} of the student "
            f"and {teacher_logits.shape} of the teacher"
        )
    if not temperature > 0 or not 0 <= weight <= 1:
        raise ValueError(
            f"distillation_loss: expected temperature > 0 and weight in [0, 1]; got {temperature} "
            f"and {weight}"
        )
    teacher = jax.nn.log_softmax(lax.stop_gradient(teacher_logits) / temperature)
    student = jax.nn.log_softmax(logits / temperature)
    soft = temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1)
    if labels is None:
        return soft
    hard = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return weight * soft + (1 - weight) * hard


def hidden_loss(
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    pairs: Mapping[str, str],
    projections: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Computes the mean squared difference between hidden states of a student and of a teacher.

        logits, seen = ft.capture(model, "blocks")(params, x)
        _, wanted = ft.capture(teacher, "encoder")(teacher_params, x)
        loss = compress.hidden_loss(seen, wanted, {"blocks": "encoder"}, {"blocks": projection})

    Args:
        student, teacher: {name: value}, as the functions that `ft.capture` returns give them as
            their second result. No gradient flows to the teacher.
        pairs: {name of a student's value: name of a teacher's value}.
        projections: {name of a student's value: matrix [student's features, teacher's features]},
            for values whose number of features differs. The student's value is multiplied by it
            first. Train these matrices together with the student. Default: none.

    Returns:
        A scalar: the mean squared difference of each pair, averaged over the pairs.

    Raises:
        KeyError: a value that `pairs` names was not captured.
        ValueError: the shapes of the two values of a pair differ, or `pairs` is empty.

    Source: Romero et al. (2015), FitNets: Hints for Thin Deep Nets, eq. 3.

    >>> from fnet import compress
    >>> seen, wanted = {"mlp": jnp.ones((2, 3))}, {"body": jnp.zeros((2, 3))}
    >>> float(compress.hidden_loss(seen, wanted, {"mlp": "body"}))
    1.0
    """
    if not pairs:
        raise ValueError(
            "hidden_loss: expected pairs {site of the student: site of the teacher}; got none"
        )
    losses = []
    for mine, theirs in pairs.items():
        for name, values, who in ((mine, student, "student"), (theirs, teacher, "teacher")):
            if name not in values:
                raise KeyError(
                    f"hidden_loss: the {who} has no site {name!r}; captured: {', '.join(values)}"
                )
        value, wanted = student[mine], lax.stop_gradient(teacher[theirs])
        if projections is not None and mine in projections:
            value = value @ projections[mine]
        if value.shape != wanted.shape:
            raise ValueError(
                f"hidden_loss: {mine!r} has the shape {value.shape}, {theirs!r} of the teacher "
                f"{wanted.shape}; pass projections={{{mine!r}: matrix}} for other numbers of "
                f"features"
            )
        losses.append(jnp.square(value - wanted).mean())
    return sum(losses) / len(losses)
