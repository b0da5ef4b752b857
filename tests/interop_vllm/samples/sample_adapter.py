"""L2 adapters of LMCache, written as a reader of its interface would: a right one, and wrong ones."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import xxhash
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier


class SampleAdapter(L2AdapterInterface):
    """A file for each object: its checksum and its bytes. Every task is done at once."""

    def __init__(self, config, l1_memory_desc=None):
        super().__init__()
        self._home = Path(config["path"])
        self._home.mkdir(parents=True, exist_ok=True)
        self._tasks = itertools.count()
        self._events = [create_event_notifier() for _ in range(3)]
        self._stored, self._found, self._loaded = {}, {}, {}

    def get_store_event_fd(self):
        return self._events[0].fileno()

    def get_lookup_and_lock_event_fd(self):
        return self._events[1].fileno()

    def get_load_event_fd(self):
        return self._events[2].fileno()

    def submit_store_task(self, keys, objects):
        task, written = next(self._tasks), 0
        for key, item in zip(keys, objects, strict=True):
            file = self._file(key, self.layout(item.get_shapes(), item.get_dtypes()))
            if not file.exists():
                content = bytes(item.byte_array)
                part = file.with_suffix(f".{task}-{id(self)}")
                part.write_bytes(self.seal(file, content) + content)
                part.replace(file)
                written += len(content)
        self._stored[task] = L2StoreResult(True, written)
        self._events[0].notify()
        return task

    def pop_completed_store_tasks(self):
        stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(self, keys, group_layout_descs):
        task, found = next(self._tasks), Bitmap(len(keys))
        for index, key in enumerate(keys):
            layout = group_layout_descs[key.object_group_id]
            if self._file(key, self.layout(layout.shapes, layout.dtypes)).exists():
                found.set(index)
        self._found[task] = found
        self._events[1].notify()
        return task

    def query_lookup_and_lock_result(self, task_id):
        return self._found.pop(task_id, None)

    def submit_unlock(self, keys):
        pass

    def submit_load_task(self, keys, objects):
        task, loaded = next(self._tasks), Bitmap(len(keys))
        for index, (key, item) in enumerate(zip(keys, objects, strict=True)):
            file = self._file(key, self.layout(item.get_shapes(), item.get_dtypes()))
            try:
                content = file.read_bytes()
            except FileNotFoundError:
                continue
            if len(content) == 8 + item.get_size() and self.is_sound(
                content[:8], file, content[8:]
            ):
                np.frombuffer(item.byte_array, np.uint8)[:] = np.frombuffer(content[8:], np.uint8)
                loaded.set(index)
            else:
                file.unlink(missing_ok=True)
        self.finish(task, loaded)
        return task

    def query_load_result(self, task_id):
        return self._loaded.pop(task_id, None)

    def close(self):
        for event in self._events:
            event.close()

    def finish(self, task, loaded):
        """Report a load."""
        self._loaded[task] = loaded
        self._events[2].notify()

    def seal(self, file, content):
        """The checksum of an object and its name: whole files may change places."""
        return xxhash.xxh3_64_digest(file.name.encode() + content)

    def is_sound(self, seal, file, content):
        """Whether an object is the one that was sealed."""
        return seal == self.seal(file, content)

    def layout(self, shapes, dtypes):
        """What keeps objects apart beside their keys."""
        return repr((list(map(tuple, shapes)), list(map(str, dtypes))))

    def _file(self, key, layout):
        return self._home / hashlib.sha256(f"{key} {layout}".encode()).hexdigest()


class DeliversDamage(SampleAdapter):
    """Verifies no checksum."""

    def is_sound(self, seal, file, content):
        return True


class ByKeyAlone(SampleAdapter):
    """Keeps objects apart by LMCache's keys, which tell no element type."""

    def layout(self, shapes, dtypes):
        return ""


class ForgetsTheEvent(SampleAdapter):
    """Finishes loads, and signals none."""

    def finish(self, task, loaded):
        self._loaded[task] = loaded
