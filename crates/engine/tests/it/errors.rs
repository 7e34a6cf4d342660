//! How far the integer products of each class are from the exact ones, operation by operation, on the oracle's debug inputs.
//! The table in `docs/numerics.md` is what this test prints:
//! `cargo test -p troika-engine --test it errors_by_operation -- --nocapture`

use std::collections::BTreeMap;

use troika_base::{NumericClass, StoredTensor};
use troika_device::cpu::{WeightForm, weight_form};
use troika_graph::{Role, Scope, WeightKey, WeightSource};
use troika_kernels::int8::{self, Int8Expert, Int8Matrix};
use troika_kernels::{self as kernels, Ctx, ExpertWeights};
use troika_model::{ModelConfig, WeightTable};
use troika_testkit::Golden;

use crate::support::{checkpoint, kept_rows};

/// `(Σ(got - want)², Σwant²)`.
type Squares = (f64, f64);

/// A model's weights, multiplied as a class does it.
struct Products<'a> {
    class: NumericClass,
    config: &'a ModelConfig,
    weights: &'a WeightTable,
}

impl Products<'_> {
    fn tensor(&self, scope: Scope, role: Role) -> StoredTensor {
        self.weights.tensor(WeightKey { scope, role }).expect("the model has it")
    }

    /// As the device keeps it; `None` for products in `f32`.
    fn int8(&self, role: Role, w: &StoredTensor) -> Option<Int8Matrix> {
        match weight_form(self.class, role, w.format()) {
            WeightForm::Stored => None,
            WeightForm::StoredIntegers => Int8Matrix::refer(w),
            WeightForm::Packed => Some(Int8Matrix::pack(Ctx::serial(), w)),
        }
    }

    fn linear(&self, scope: Scope, role: Role, groups: usize, x: &[f32]) -> Vec<f32> {
        let w = self.tensor(scope, role);
        let mut out = vec![0.0; x.len() / (groups * w.cols()) * w.rows()];
        match self.int8(role, &w) {
            Some(w) => int8::grouped_matmul(Ctx::serial(), x, groups, &w, &mut out),
            None => kernels::grouped_matmul(Ctx::serial(), x, groups, &w, &mut out),
        }
        out
    }

    fn shared_expert(&self, scope: Scope, x: &[f32]) -> Vec<f32> {
        let roles = [Role::SharedW1, Role::SharedW2, Role::SharedW3];
        let [w1, w2, w3] = roles.map(|role| self.tensor(scope, role));
        let packed: Vec<Int8Matrix> = roles.iter().zip([&w1, &w2, &w3]).filter_map(|(r, w)| self.int8(*r, w)).collect();
        let (mut out, limit) = (vec![0.0; x.len()], self.config.swiglu_limit.map(|limit| limit as f32));
        match &packed[..] {
            [w1, w2, w3] => int8::shared_expert(Ctx::serial(), x, &Int8Expert { w1, w2, w3 }, limit, &mut out),
            _ => {
                let w = ExpertWeights { w1: &w1, w2: &w2, w3: &w3 };
                kernels::shared_expert(Ctx::serial(), x, &w, limit, &mut out);
            }
        }
        out
    }

    fn routed_experts(&self, scope: Scope, x: &[f32], ids: &[i32], shares: &[f32]) -> Vec<f32> {
        let role = [Role::ExpertW1, Role::ExpertW2, Role::ExpertW3];
        let experts: Vec<[StoredTensor; 3]> = (0..self.config.n_routed_experts as u16)
            .map(|expert| role.map(|role| self.tensor(scope, role(expert))))
            .collect();
        let (top_k, limit) = (self.config.num_experts_per_tok, self.config.swiglu_limit.map(|limit| limit as f32));
        let mut acc = vec![0.0; x.len()];
        if self.class.has_integer_products() {
            let refer = |w: &StoredTensor| Int8Matrix::refer(w).expect("the tiny model's experts are fp4");
            let experts: Vec<[Int8Matrix; 3]> = experts.iter().map(|w| w.each_ref().map(refer)).collect();
            let experts: Vec<Int8Expert> = experts.iter().map(|[w1, w2, w3]| Int8Expert { w1, w2, w3 }).collect();
            int8::routed_experts(Ctx::serial(), x, ids, shares, top_k, 0, &experts, limit, &mut acc);
        } else {
            let experts: Vec<ExpertWeights> = experts.iter().map(|[w1, w2, w3]| ExpertWeights { w1, w2, w3 }).collect();
            kernels::routed_experts(Ctx::serial(), x, ids, shares, top_k, 0, &experts, limit, &mut acc);
        }
        acc
    }

    /// Every product of the model with weights of many numbers, on the golden inputs.
    fn all(&self, golden: &Golden) -> BTreeMap<&'static str, Vec<f32>> {
        let rows = golden.i64("rows").data;
        let mut outputs: BTreeMap<&'static str, Vec<f32>> = BTreeMap::new();
        let mut put = |name, output: Vec<f32>| outputs.entry(name).or_default().extend(output);
        for layer in 0..self.config.num_hidden_layers as u16 {
            let scope = Scope::Layer(layer);
            let key = |name: &str| format!("L{layer}.{name}");
            let input = |name: &str| golden.f32(&key(name)).data;
            put("wq_a", self.linear(scope, Role::WqA, 1, &input("attn_in")));
            put("wq_b", self.linear(scope, Role::WqB, 1, &input("q_lora")));
            put("wkv", self.linear(scope, Role::Wkv, 1, &input("attn_in")));
            put("wo_a", self.linear(scope, Role::WoA, self.config.o_groups, &input("attn_heads")));
            // The oracle did not note what goes between the two; what exact products make of its input does as well.
            let exact = Self { class: NumericClass::Exact, ..*self };
            let low_rank = exact.linear(scope, Role::WoA, self.config.o_groups, &input("attn_heads"));
            put("wo_b", self.linear(scope, Role::WoB, 1, &low_rank));
            if golden.contains(&key("index_topk")) {
                put("index wq_b", self.linear(scope, Role::IndexerWqB, 1, &input("q_lora")));
            }
            put("router", self.linear(scope, Role::Gate, 1, &input("ffn_in")));
            put("shared expert", self.shared_expert(scope, &input("ffn_in")));
            let top_k = self.config.num_experts_per_tok;
            let ids: Vec<i32> = golden.i64(&key("expert_ids")).data.into_iter().map(|id| id as i32).collect();
            let ids: Vec<i32> = rows.iter().flat_map(|row| &ids[*row as usize * top_k..][..top_k]).copied().collect();
            let shares = kept_rows(&input("expert_weights"), top_k, &rows);
            put("routed experts", self.routed_experts(scope, &input("ffn_in"), &ids, &shares));
        }
        put("head", self.linear(Scope::Model, Role::Head, 1, &golden.f32("final.normed").data));
        outputs
    }
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    let squares = got.iter().zip(want).fold((0.0, 0.0), |(error, size): Squares, (got, want)| {
        (error + f64::from(got - want).powi(2), size + f64::from(*want).powi(2))
    });
    (squares.0 / squares.1).sqrt()
}

#[test]
fn errors_by_operation() {
    let golden = Golden::open("golden_debug");
    let (config, weights) = checkpoint("tiny");
    let outputs = |class| Products { class, config: &config, weights: &weights }.all(&golden);
    let exact = outputs(NumericClass::Exact);
    let (fast, fp8_exact) = (outputs(NumericClass::Fast), outputs(NumericClass::FastFp8Exact));
    println!("{:<16}{:>10}{:>16}", "relative error", "fast", "fast-fp8-exact");
    for (name, want) in &exact {
        let [fast, fp8_exact] = [&fast[name], &fp8_exact[name]].map(|got| relative_error(got, want));
        println!("{name:<16}{fast:>10.5}{fp8_exact:>16.5}");
        match *name {
            "router" => assert_eq!([fast, fp8_exact], [0.0; 2], "{name}: both compute it exactly"),
            // Activations are rounded to 8 bits, weights are exact. An expert rounds its hidden rows too.
            "routed experts" => {
                assert_eq!(fast, fp8_exact, "{name}: one kernel");
                assert!((0.001..0.02).contains(&fast), "{name}: {fast}");
            }
            _ => {
                assert!((0.001..0.02).contains(&fast), "{name}: {fast}");
                assert_eq!(fp8_exact, 0.0, "{name}: no weight of it is fp4");
            }
        }
    }
}
