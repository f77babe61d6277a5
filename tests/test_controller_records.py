"""Snapshots keep the shape of what they hold, single numbers included."""

from __future__ import annotations

import numpy as np

from prefetcher.controller.records import pack_arrays, unpack_arrays


def test_single_numbers_stay_single() -> None:
    given = {"origin_s": np.array(7.5), "rows": np.arange(6.0).reshape(2, 3).T}
    arrays, meta = unpack_arrays(pack_arrays(given, {"position": 3}))
    assert meta == {"position": 3}
    assert arrays["origin_s"].shape == ()
    assert float(arrays["origin_s"]) == 7.5
    np.testing.assert_array_equal(arrays["rows"], given["rows"])
