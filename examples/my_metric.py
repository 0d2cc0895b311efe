"""Metrics of your own: a function of the predictions, and a `Metric`, which says how people see it.

folb compare synthetic_1_1 --metrics fairness,examples/my_metric.py:gap,examples/my_metric.py:rarest
"""

import jax.numpy as jnp

from folb import Metric


def gap(own):
    """The accuracy of the best device less that of the worst."""
    return jnp.nanmax(own) - jnp.nanmin(own)  # NaN: a device without test samples


def recall_of_the_rarest(y, predicted, classes):
    """How many samples of the rarest class are found."""
    count = jnp.zeros(classes, jnp.int32).at[y].add(1)
    rarest = jnp.argmin(jnp.where(count > 0, count, len(y)))
    return jnp.sum((y == rarest) & (predicted == rarest)) / count[rarest]


rarest = Metric("rarest", recall_of_the_rarest, words="recall of the rarest class", unit="%", task="classes")
