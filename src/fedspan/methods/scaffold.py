"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al. 2020, arXiv:1910.06378), Algorithm 1.

     5  send (x, c) to the clients in S
    10  y ← y − η_l (g_i(y) − c_i + c)              K times, from y = x
    12  c_i⁺ ← c_i − c + (x − y) / (K η_l)          option II
    17  x ← x + η_g mean_S Δy;  c ← c + (|S|/N) mean_S Δc

Differences from the paper: clients send Δc alone, d values instead of 2d. With option II the server can compute
mean_S Δy = −K η_l (c + mean_S Δc) from it. With privacy c moves by the sum of the Δc, divided by N, whoever takes part.
Clients may have weights w_i; then c = Σ w_i c_i. Local momentum or another optimizer works on the corrected gradient.
The mean gradient then does not follow from the end point: c_i⁺ is the mean itself, and Δy is sent too. Option I, a
full gradient as the control, is not offered.
"""

from dataclasses import dataclass

from fedspan import Drift, register
from fedspan.drifts.controls import Controls
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class Scaffold(Box):
    """Drift correction by control variates of the size of the model."""

    drift: Drift = Controls()  # what keeps local steps from drifting
