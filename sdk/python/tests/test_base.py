import inspect
import unittest

from sandboxer.extensions.base import SandboxExtension


class Minimal(SandboxExtension):
    def provision(self, profile, inputs, host): ...
    def wait_ready(self, handle): ...
    def teardown(self, handle): ...


class TestBase(unittest.TestCase):
    """The base class is that of the Python sand-boxer, name by name."""

    def test_signatures(self):
        want = {
            "__init__": "(self, config: 'Optional[dict[str, Any]]' = None) -> 'None'",
            "new_sandbox_id": "(inputs: 'dict[str, str]') -> 'str'",
            "provision": "(self, profile: 'Profile', inputs: 'dict[str, str]', host: 'str') -> 'dict[str, str]'",
            "wait_ready": "(self, handle: 'dict[str, str]') -> 'dict[str, str]'",
            "teardown": "(self, handle: 'dict[str, str]') -> 'dict[str, str]'",
            "estimate_cost": "(self, profile: 'Profile', inputs: 'dict[str, str]', *, duration_s: 'int' = 3600) -> 'Optional[MeterQuote]'",
            "meter_actual": "(self, handle: 'dict[str, str]', *, duration_s: 'float') -> 'Optional[float]'",
            "supports_snapshots": "(self) -> 'bool'",
            "snapshot": "(self, handle: 'dict[str, str]') -> 'dict[str, str]'",
            "restore_from_snapshot": "(self, profile: 'Profile', snapshot_meta: 'dict[str, str]', inputs: 'dict[str, str]', host: 'str') -> 'dict[str, str]'",
        }
        for name, signature in want.items():
            self.assertEqual(str(inspect.signature(getattr(SandboxExtension, name))), signature, name)
        self.assertEqual(SandboxExtension.__abstractmethods__, {"provision", "wait_ready", "teardown"})

    def test_defaults(self):
        e = Minimal()
        self.assertEqual(e.config, {})
        self.assertEqual(Minimal({"a": 1}).config, {"a": 1})
        self.assertEqual(e.new_sandbox_id({"sandbox_id": "mine"}), "mine")
        ids = {e.new_sandbox_id({}) for _ in range(50)}
        self.assertEqual((len(ids), {len(i) for i in ids}), (50, {8}))
        self.assertIsNone(e.estimate_cost(None, {}))
        self.assertIsNone(e.meter_actual({}, duration_s=1.5))
        self.assertFalse(e.supports_snapshots())
        with self.assertRaisesRegex(NotImplementedError, "^Minimal does not support snapshots$"):
            e.snapshot({})
        with self.assertRaisesRegex(NotImplementedError, "^Minimal does not support restore$"):
            e.restore_from_snapshot(None, {}, {}, "localhost")
