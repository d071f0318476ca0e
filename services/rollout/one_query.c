/* Attention of a decode pass on one CPU thread: one query a row, each row as long as its own mask says.
 *
 * B rows, K key/value heads, G query heads of each, L positions, D width of queries and keys, E width of values.
 * query [B, K, G, D] and out [B, K, G, E] are dense; keys and values are read where they lie, by strides of row, head and
 * position; mask [B, L] is added to the scores, and positions at either end of a row that it hides are not read at all.
 * Heads of one key are taken in pairs: both use the key while it is in a register.
 */

#include <float.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

struct shape { int64_t B, K, G, L, D, E, key_row, key_head, key_step, value_row, value_head, value_step, mask_row; };

/* e^x for x <= 0, within 2 units of the last place: Cephes' polynomial on [-ln 2 / 2, ln 2 / 2], times a power of two. */
INLINE float exp_nonpositive(float x)
{
    x = x < -87.0f ? -87.0f : x;
    const float n = (float)(int32_t)(x * 1.44269504088896341f - 0.5f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float power; } two = {((int32_t)n + 127) << 23};
    return p * two.power;
}

/* N query heads over one key head: score, softmax, mix. `weights` has room for N * L. */
INLINE void heads(
    const float *restrict query, const float *restrict key, const float *restrict value, const float *restrict mask,
    float *restrict out, float *restrict weights, float scale, int64_t L, int64_t key_step, int64_t value_step,
    const int64_t D, const int64_t E, const int N)
{
    float total[N], mixed[N][E];
    for (int64_t l = 0; l < L; l++)
        for (int g = 0; g < N; g++) {
            float dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < D; d++) dot += query[g * D + d] * key[l * key_step + d];
            weights[g * L + l] = dot * scale + mask[l];
        }
    for (int g = 0; g < N; g++) {
        float *restrict w = weights + g * L;
        float most = -FLT_MAX, sum = 0;
        #pragma omp simd reduction(max : most)
        for (int64_t l = 0; l < L; l++) most = w[l] > most ? w[l] : most;
        #pragma omp simd reduction(+ : sum)
        for (int64_t l = 0; l < L; l++) { w[l] = exp_nonpositive(w[l] - most); sum += w[l]; }
        total[g] = sum;
        for (int64_t e = 0; e < E; e++) mixed[g][e] = 0;
    }
    for (int64_t l = 0; l < L; l++)
        for (int g = 0; g < N; g++) {
            const float w = weights[g * L + l];
            #pragma omp simd
            for (int64_t e = 0; e < E; e++) mixed[g][e] += w * value[l * value_step + e];
        }
    for (int g = 0; g < N; g++)
        for (int64_t e = 0; e < E; e++) out[g * E + e] = mixed[g][e] / total[g];
}

INLINE void rows(
    const struct shape *s, const float *query, const float *key, const float *value, const float *mask, float *out,
    float *weights, float scale, const int64_t D, const int64_t E)
{
    for (int64_t b = 0; b < s->B; b++) {
        const float *seen = mask + b * s->mask_row;
        int64_t first = 0, last = s->L;
        while (last > 1 && seen[last - 1] <= -FLT_MAX) last--;
        while (first < last - 1 && seen[first] <= -FLT_MAX) first++;
        for (int64_t h = 0; h < s->K; h++) {
            const float *k = key + b * s->key_row + h * s->key_head + first * s->key_step;
            const float *v = value + b * s->value_row + h * s->value_head + first * s->value_step;
            const float *q = query + (b * s->K + h) * s->G * D;
            float *o = out + (b * s->K + h) * s->G * E;
            int64_t g = 0;
            for (; g + 2 <= s->G; g += 2)
                heads(q + g * D, k, v, seen + first, o + g * E, weights, scale, last - first, s->key_step, s->value_step, D, E, 2);
            if (g < s->G)
                heads(q + g * D, k, v, seen + first, o + g * E, weights, scale, last - first, s->key_step, s->value_step, D, E, 1);
        }
    }
}

/* `weights` is scratch: 2 * L floats. The usual widths are compiled apart, so that their loops are unrolled. */
void one_query(
    const struct shape *s, const float *query, const float *key, const float *value, const float *mask, float *out,
    float *weights, float scale)
{
    if (s->D == 32 && s->E == 32) rows(s, query, key, value, mask, out, weights, scale, 32, 32);
    else if (s->D == 64 && s->E == 64) rows(s, query, key, value, mask, out, weights, scale, 64, 64);
    else if (s->D == 128 && s->E == 128) rows(s, query, key, value, mask, out, weights, scale, 128, 128);
    else rows(s, query, key, value, mask, out, weights, scale, s->D, s->E);
}
