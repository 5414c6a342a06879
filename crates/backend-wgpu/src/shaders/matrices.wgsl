// Types of cooperative matrices of SIDE times SIDE: rows and outputs have half precision, sums single precision.
//% provides Outs Rows Sums
enable f16;
enable wgpu_cooperative_matrix;
//% if SIDE_8
alias Rows = coop_mat8x8<f16, A>;
alias Outs = coop_mat8x8<f16, B>;
alias Sums = coop_mat8x8<f32, C>;
//% else
alias Rows = coop_mat16x16<f16, A>;
alias Outs = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;
//% end
