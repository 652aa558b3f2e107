"""What every test has: the same random numbers in every run and every order."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
    random.seed(0)
