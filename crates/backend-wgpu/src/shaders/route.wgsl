// Chooses the experts of rows. One workgroup has one row.
//% needs choose
@compute @workgroup_size(CHOOSERS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  choose(tid, wid.x, true);
}
