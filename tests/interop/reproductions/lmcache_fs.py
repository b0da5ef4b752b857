"""What matrix.md says about `lmcache-fs` and `lmcache-fs-native`, shown with LMCache alone.

`python lmcache_fs.py fs [RULE]...`, or `fs_native`.
"""

import select
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd
from shows import main, shows

KIND = sys.argv.pop(1)
KEY = ObjectKey(chunk_hash=bytes(32), model_name="model", kv_rank=0x01000100)
SHAPE = torch.Size((64, 32))


class Server:
    """An object in LMCache's L1 memory, and an adapter on a directory."""

    def __init__(self, root, dtype=torch.bfloat16):
        memory = L1MemoryManager(
            L1MemoryManagerConfig(size_in_bytes=1 << 20, use_lazy=False, shm_name="")
        )
        self.layout = MemoryLayoutDesc([SHAPE], [dtype])
        _, [self.item] = memory.allocate(self.layout, 1)
        config = get_l2_adapter_config_class(KIND).from_dict({"type": KIND, "base_path": str(root)})
        self.adapter = create_l2_adapter(config, memory.get_l1_memory_desc())
        self.memory = memory

    def fill(self, value):
        """Make every byte of the object `value`."""
        np.frombuffer(self.item.byte_array, np.uint8)[:] = value

    def wrong_bytes(self, value):
        """How many bytes of the object are not `value`."""
        return self.item.get_size() - bytes(self.item.byte_array).count(value)

    def store(self, value):
        """Store the object full of a value; whether that was done."""
        self.fill(value)
        self.adapter.submit_store_task([KEY], [self.item])
        wait(self.adapter.get_store_event_fd())
        [result] = self.adapter.pop_completed_store_tasks().values()
        return result.is_successful()

    def finds(self):
        """Whether a lookup is a hit."""
        task = self.adapter.submit_lookup_and_lock_task([KEY], {0: self.layout})
        wait(self.adapter.get_lookup_and_lock_event_fd())
        return self.adapter.query_lookup_and_lock_result(task).test(0)

    def load(self):
        """Load into the object; whether that was done."""
        self.fill(0)
        task = self.adapter.submit_load_task([KEY], [self.item])
        wait(self.adapter.get_load_event_fd())
        return self.adapter.query_load_result(task).test(0)


def wait(descriptor):
    """Wait for an event, as LMCache's controllers do."""
    assert select.select([descriptor], [], [], 30)[0], "no event"
    consume_fd(descriptor)


def make_root():
    """An empty directory."""
    return Path(tempfile.mkdtemp(prefix="reproduction-"))


def object_file(root):
    """The file that has the object."""
    [file] = root.rglob("*.data")
    return file


@shows("GET-5", "GET-1")
def damaged_bytes_are_delivered(make):
    """An object of which one byte was changed on disk is loaded, and its bit is 1."""
    root = make()
    assert Server(root).store(7)
    with object_file(root).open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    other = Server(root)
    assert other.finds()
    assert other.load()
    assert other.wrong_bytes(7) == 1


@shows("ID-1")
def element_types_meet(make):
    """An object of bfloat16 is a hit and delivered to an engine whose objects are of float16."""
    root = make()
    assert Server(root).store(7)
    other = Server(root, dtype=torch.float16)
    assert other.finds()
    assert other.load()
    assert other.wrong_bytes(7) == 0


@shows("EX-9", "GET-7", "SET-3")
def an_unreadable_object_stays(make):
    """An object whose file was cut short goes on existing, and a store does not repair it."""
    root = make()
    assert Server(root).store(7)
    with object_file(root).open("r+b") as file:
        file.truncate(100)
    other = Server(root)
    assert not other.load()
    assert other.finds()
    assert other.store(7)
    assert not other.load()


if __name__ == "__main__":
    main(make_root)
