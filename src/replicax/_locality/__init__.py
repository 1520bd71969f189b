"""Which values differ between replicas, and where did they begin to?"""

from replicax._locality.marks import assert_mirrored as assert_mirrored
from replicax._locality.replicas import Analysis as Analysis
from replicax._locality.replicas import Finding as Finding
from replicax._locality.replicas import analyse as analyse
from replicax._locality.rows import Rows as Rows
from replicax._locality.rows import analyse_rows as analyse_rows
from replicax._locality.sites import Site as Site
from replicax._locality.sites import call_site as call_site
from replicax._locality.sites import is_users as is_users
from replicax._locality.sites import user_site as user_site
from replicax._locality.sites import warn_user as warn_user
from replicax._locality.states import MIRRORED as MIRRORED
from replicax._locality.states import Differs as Differs
from replicax._locality.states import Mirrored as Mirrored
from replicax._locality.states import Origin as Origin
from replicax._locality.states import State as State
from replicax._locality.states import differs as differs
from replicax._locality.states import origin_of as origin_of
