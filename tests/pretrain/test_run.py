"""`wholebatch train`, from data to report."""

import json

from conftest import newest, records
from safetensors.numpy import load_file
