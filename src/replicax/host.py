"""How this process is set up for many CPU devices: `rx.host.configure(cpu_devices=8)`, `rx.host.describe()`."""

from replicax._host import HostReport as HostReport
from replicax._host import configure as configure
from replicax._host import describe as describe
