// The attributes of a thread: one field per `[[attribute]]` that MLX can add to a kernel's signature. Filled by the
// runtime (C++) and read by the generated entry point (C++ for OpenCL), so only plain types appear here.
#pragma once

struct msl_thread_attributes {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threads_per_threadgroup[3];           // of this threadgroup: smaller at the edge of the grid
  unsigned dispatch_threads_per_threadgroup[3];  // as requested
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned grid_size[3];
  unsigned grid_origin[3];
  unsigned thread_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned thread_index_in_quadgroup;
  unsigned simdgroup_index_in_threadgroup;
  unsigned quadgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup;
  unsigned quadgroups_per_threadgroup;
  unsigned dispatch_simdgroups_per_threadgroup;
  unsigned dispatch_quadgroups_per_threadgroup;
  unsigned threads_per_simdgroup;
  unsigned thread_execution_width;
};
