// Which CPUs threads run on, and how many the container grants: with more threads than that the system stalls them all.
#pragma once

#include <string>
#include <thread>

namespace quire {

// CPUs granted by the affinity mask and the cgroup (v1, v2) CPU quota rounded down, at least 1.
int available_cpus();

// CPUs that cgroups grant: the tightest quota over the groups named in `groups_file` (as /proc/self/cgroup) and all
// their ancestors under `mount`. 0: no limit.
double cpu_quota(const std::string& groups_file, const std::string& mount);

// From now on the thread runs on this CPU alone; as before if the process may no longer use it.
void pin_to_cpu(std::thread& thread, int cpu);

}  // namespace quire
