import math
import unittest
from decimal import Decimal

from sandboxer.models import MeterQuote, Profile, micros


class TestAmounts(unittest.TestCase):
    def test_shortest_decimal_half_even(self):
        for amount, want in [
            (0, 0), (1, 1_000_000), (0.1, 100_000), (0.1 + 0.2, 300_000), ("0.12", 120_000), (Decimal("2.5"), 2_500_000),
            (0.0000005, 0), (0.0000015, 2), (0.0000025, 2), (1e-7, 0), (9223372036854.0, 9223372036854_000_000),
        ]:
            self.assertEqual(micros(amount, "x"), want, amount)

    def test_what_is_no_amount(self):
        for amount in (math.nan, math.inf, -math.inf, -0.01, 1e308, True, None, [], "a lot", "NaN", Decimal("-1"), 9223372036855):
            with self.assertRaises(ValueError, msg=repr(amount)):
                micros(amount, "x")


class TestRecords(unittest.TestCase):
    def test_attributes_and_keys(self):
        p = Profile({"id": "profile.x", "ttl_ns": 5, "limits": {"pids": 3}})
        self.assertEqual((p.id, p["id"], p.ttl_ns, p.get("none"), p.none), ("profile.x", "profile.x", 5, None, None))
        with self.assertRaises(KeyError):
            p["none"]
        with self.assertRaises(AttributeError):
            p.id = "other"
        self.assertEqual(sorted(p), ["id", "limits", "ttl_ns"])

    def test_quote_of_a_number(self):
        self.assertEqual(float(MeterQuote(0.12)), 0.12)
        self.assertEqual(MeterQuote(0.12), MeterQuote(amount=0.12))
        self.assertEqual(MeterQuote(amount=1, detail="by the hour").detail, "by the hour")
