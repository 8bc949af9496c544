"""Random settings of the theorem."""

from __future__ import annotations

from hypothesis import strategies as st

from fedspan.theory.setting import Setting

SETTINGS = st.builds(
    Setting,
    L=st.floats(1e-2, 1e4),
    sigma2=st.one_of(st.just(0.0), st.floats(1e-4, 1e4)),
    gap=st.floats(1e-3, 1e4),
    control=st.floats(0, 1e4),
    rho=st.floats(0.01, 1),
    clients=st.integers(2, 50),
    local_steps=st.integers(1, 20),
    rounds=st.integers(1, 100_000),
)
