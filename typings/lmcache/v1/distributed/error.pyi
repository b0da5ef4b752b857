from enum import Enum

class L1Error(Enum):
    SUCCESS = 0
