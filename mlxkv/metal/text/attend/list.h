// Records that are read by a list of chunks.

#if WITH_LIST
// Where the `unit`-th record that is read lies: `list` names chunks of LIST records.
template <int LIST>
inline int kv_place(const device int* list, int unit) {
  return list[unit / LIST] * LIST + unit % LIST;
}
#endif
