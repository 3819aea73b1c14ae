#include "runtime/available_cpus.h"

#include <fstream>
#include <sstream>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace quire {
namespace {

double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0, period = 0;  // "max" is no number: no limit
  if (!(file >> quota >> period) || period <= 0) return 0;
  return quota / period;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

// The tightest quota on the way from the process's group up to the mount, as each ancestor limits it too. 0: no limit.
double tightest_quota(const std::string& mount, std::string group, double (*quota_of)(const std::string&)) {
  double tightest = 0;
  while (true) {
    const double quota = quota_of(mount + group);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
    if (group.empty()) return tightest;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

int affinity_cpus() {
#if defined(__linux__)
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#endif
  const int count = int(std::thread::hardware_concurrency());
  return count > 0 ? count : 1;
}

}  // namespace

double cpu_quota(const std::string& groups_file, const std::string& mount) {
  std::ifstream groups(groups_file);
  double tightest = 0;
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::stringstream controllers(line.substr(first + 1, second - first - 1));
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    double quota = line.starts_with("0::") ? tightest_quota(mount, path, quota_v2) : 0;
    for (std::string name; std::getline(controllers, name, ',');) {
      if (name == "cpu") quota = tightest_quota(mount + "/cpu", path, quota_v1);
    }
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  }
  return tightest;
}

int available_cpus() {
  const int cpus = affinity_cpus();
  const double quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
  if (quota <= 0 || quota >= cpus) return cpus;
  return quota < 1 ? 1 : int(quota);
}

void pin_to_cpu([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(cpu, bytes, set);
  pthread_setaffinity_np(thread.native_handle(), bytes, set);
  CPU_FREE(set);
#endif
}

}  // namespace quire
