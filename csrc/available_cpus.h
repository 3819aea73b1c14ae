// How many CPUs the container grants: asking for more threads than that makes the kernel stall all of them.
#pragma once

#include <string>

namespace quire {

// CPUs granted by the affinity mask and the cgroup (v1, v2) CPU quota rounded down, at least 1.
int available_cpus();

// CPUs that cgroups grant: the tightest quota over the groups named in `groups_file` (as /proc/self/cgroup) and all
// their ancestors under `mount`. 0: no limit.
double cpu_quota(const std::string& groups_file, const std::string& mount);

}  // namespace quire
