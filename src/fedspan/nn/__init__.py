"""A torch module restricted to x + Pᵀz: layers that keep the projected input and never form a full weight gradient."""
